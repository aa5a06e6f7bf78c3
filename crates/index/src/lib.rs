//! Who holds which block: sources, byte budget, digests.
