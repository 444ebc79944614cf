"""Phase 0: which combinations of LoRA, speculation and runtime options work, and losslessly?

Cells are enumerated and pruned in `cells`, turned into requests in `workload` and into engines in `jobs`,
run by `process` and `engine` on the tiny models of `inputs`, judged in `verdict`, planned and recorded in
`runner`. `fallback` says what serving should do where a cell does not work. Only `engine` imports vllm, and
only `inputs` torch, inside functions.
"""
