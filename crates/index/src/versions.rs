//! Numbers of states.
//!
//! Whatever readers look at has the number of the change that made it what it is. Numbers grow, and there is one writer: what
//! has a number up to that at which a batch began is as it was before the batch.

/// Gives out numbers, which are even: an odd one says that something is changing.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    newest: u64,
}

impl Versions {
    /// One that was never used.
    pub(crate) fn next(&mut self) -> u64 {
        self.newest += 2;
        self.newest
    }

    /// The one that was given out last.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }
}
