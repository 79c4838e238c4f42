"""PyTorch's doors to the compiler: a backend of ``torch.compile``, and ``ORTModule`` over it (docs/torch-compile.md)."""
