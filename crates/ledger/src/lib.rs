//! Engine events to an exact account of the blocks each rank holds: ring, snapshot, digest.
