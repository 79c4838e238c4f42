"""Mixed precision: which values are bfloat16 or float16, and where they are cast."""
