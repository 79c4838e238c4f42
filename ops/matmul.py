"""Operator table: matmul."""
