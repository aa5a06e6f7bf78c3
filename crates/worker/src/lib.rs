//! The worker's gRPC server, its ledger, and the engines it can host.
