"""Operator table: embedding."""
