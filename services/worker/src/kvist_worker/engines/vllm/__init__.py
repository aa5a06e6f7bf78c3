"""The adapter `vllm`: `AsyncLLM` behind the worker's server. Only `binding` imports vLLM."""
