"""The generation of a pool's contract: equal contracts have equal revisions, whoever computes them and when."""

import hashlib
import json

from kvist_controller.resources import ModelServiceSpec

REVISION_HEX_DIGITS = 12


def pool_revision(spec: ModelServiceSpec) -> str:
    """Names what the workers of a pool must agree on.

    Replicas, aliases and time limits are left out: changing them restarts no worker.
    """
    contract = {
        "model": spec.model,
        "engine": spec.engine.name,
        "arguments": spec.engine.arguments,
        "role": spec.role,
        "tokenizerDigest": spec.tokenizer_digest,
        "hashUnitTokens": spec.hash_unit_tokens,
    }
    canonical = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_HEX_DIGITS]
