//! KV events on NATS: the agent's relay, the index's subscription, catch-up.
