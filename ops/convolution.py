"""Operator table: convolution."""
