//! The one catalogue of errors: code, gRPC status, HTTP status, OpenAI and Anthropic form.
