"""Embeddings by the official client, from a real engine that was started for them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable

import openai
import pytest

pytest.importorskip("xllamacpp")

from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster

MODEL = "smollm2-135m"
TEXTS = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a percent."]


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    arguments = '{"embeddings": true, "slots": 2, "contextTokens": 256}'
    return start("--engine=llamacpp", "--workers=1", f"--engine-arguments={arguments}")


def likeness(left: list[float], right: list[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def test_the_openai_client_gets_vectors_in_every_form(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    answer = client.embeddings.create(model=MODEL, input=TEXTS, user="somebody")
    assert [0, 1, 2] == [item.index for item in answer.data]
    vectors = [item.embedding for item in answer.data]
    assert all(likeness(vector, vector) == pytest.approx(1, abs=1e-4) for vector in vectors)
    assert likeness(vectors[0], vectors[1]) > likeness(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0

    # Alone and as token ids the text is the same, whatever it was computed together with.
    alone = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(vectors[0], abs=1e-3)
    with cluster.router() as router:
        request = router_pb2.TokenizeRequest(model=MODEL)
        request.prompt.text = TEXTS[0]
        ids = list(router.Tokenize(request, timeout=30).token_ids)
    assert len(ids) == alone.usage.prompt_tokens
    by_ids = client.embeddings.create(model=MODEL, input=[ids, ids])
    assert by_ids.data[1].embedding == pytest.approx(vectors[0], abs=1e-3)

    raw = client.post(
        "/embeddings",
        body={"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"},
        cast_to=object,
    )
    coded = base64.b64decode(raw["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(coded) // 4}f", coded)) == pytest.approx(vectors[0], abs=1e-3)


def test_grpc_gives_the_same_vectors(cluster: EmbeddedCluster) -> None:
    over_http = cluster.client().embeddings.create(model=MODEL, input=TEXTS[1])
    with cluster.router() as router:
        request = router_pb2.EmbedRequest(model=MODEL)
        request.inputs.add(text=TEXTS[1])
        (embedding,) = router.Embed(request, timeout=30).embeddings
    assert list(embedding.values) == pytest.approx(over_http.data[0].embedding, abs=1e-3)
    assert embedding.prompt_tokens == over_http.usage.prompt_tokens


def test_what_cannot_be_done_is_a_clear_400(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    with pytest.raises(openai.BadRequestError, match="generate no text") as generation:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError) as shorter:
        client.embeddings.create(model=MODEL, input="x", dimensions=8)
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model=MODEL, input=["x", ""])
    with pytest.raises(openai.BadRequestError) as long:
        client.embeddings.create(model=MODEL, input="word " * 400)
    assert "context_length_exceeded" == long.value.code
    params = [refused.value.body["param"] for refused in (generation, shorter, empty)]
    assert ["model", "dimensions", "input[1]"] == params
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="x")
