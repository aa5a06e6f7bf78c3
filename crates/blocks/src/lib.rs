//! Tokens to chained content hashes of blocks, and the namespaces that seed them.
