"""One engine and its ledger."""
