"""The adapter `llamacpp`: llama.cpp inside the worker's process. Only `model` and `adapter` import it."""
