"""What a process shows on its admin port."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families


async def scrape(address: str) -> dict[str, float]:
    """The values of a process's `/metrics`, by name and labels."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in samples}
