"""vLLM called directly, by the interpreter of its own environment: greedy tokens of prompts, or their embeddings.

Reads `{"arguments": {…}, "prompts": [[id, …], …], "max_tokens": n}` from stdin and writes a list of ids for each prompt
to the file that is named; without `max_tokens`, a vector for each.
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
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    if "max_tokens" in asked:
        sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
        answers = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling)]
    else:
        answers = [list(output.outputs.embedding) for output in engine.embed(prompts)]
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
