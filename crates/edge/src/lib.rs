//! The HTTP server over the same Generate trait as the gRPC service.
