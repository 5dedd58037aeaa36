"""Checkpoints: folders of safetensors files and one manifest. Reading order: slices, manifest, files, folder, save, load."""
