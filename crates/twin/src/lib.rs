//! Virtual time: the simulated engine, and a cluster built on the crates that run live.
