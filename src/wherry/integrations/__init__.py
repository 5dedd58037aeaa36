"""Trainers of other libraries, driven by the engine. Each module needs its library; nothing here imports one."""
