"""Measurements of Wherry beside what people would use instead. Every script here works alone."""
