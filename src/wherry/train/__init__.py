"""The built-in job: pre-training of a GPT-2. Read model, data, options, loop, display, report, job."""
