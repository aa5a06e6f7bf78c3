//! The only PyO3 crate: converts and forwards, decides nothing.
