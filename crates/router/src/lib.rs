//! A request's life: text, schedule, link, retries, Explain; and the gRPC service.
