"""The DFlash drafter of the pocket target: data, model, loss, training, export.

A DFlash drafter (block diffusion, arXiv 2602.06036) drafts a block in one pass: it reads hidden states of the
target (taps) for all tokens before the last one, and predicts every masked position of the block at once.
"""
