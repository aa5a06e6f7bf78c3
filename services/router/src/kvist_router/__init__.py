"""Routes requests: HTTP edge and gRPC, in Rust."""
