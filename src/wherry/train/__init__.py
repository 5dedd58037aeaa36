"""The built-in job: pre-training of a GPT-2. Reading order: presets, model, data, options, loop, display, report, job."""
