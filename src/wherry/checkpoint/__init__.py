"""Checkpoints: folders of safetensors files and a manifest. In order: slices, manifest, files, folder, save, load."""
