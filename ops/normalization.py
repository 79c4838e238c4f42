"""Operator table: normalization."""
