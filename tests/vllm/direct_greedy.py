"""vLLM called directly, by the interpreter of its own environment: greedy tokens of prompts.

Reads `{"arguments": {…}, "prompts": [[id, …], …], "max_tokens": n}` from stdin and writes `[[id, …], …]` to the file
that is named.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Answers all prompts with an engine of its own."""
    # Processes that vLLM starts import this file again, and need none of it.
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    asked = json.load(sys.stdin)
    arguments = {name.replace("-", "_"): value for name, value in asked["arguments"].items() if value is not None}
    engine = LLM(**arguments)
    sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling)
    Path(sys.argv[1]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
