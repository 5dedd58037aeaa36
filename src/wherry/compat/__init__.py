"""The engine under the names that programs written for other libraries import."""
