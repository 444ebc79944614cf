"""Predict what a LoRA adapter does to speculative decoding, and serve the answer in vLLM."""

__version__ = "0.1.0"
