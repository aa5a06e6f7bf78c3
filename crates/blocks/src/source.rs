//! The words by which statements about caches name their place.

use std::{fmt, sync::Arc};

/// UID of a worker's slot; it survives restarts of the process.
#[derive(Clone, Debug, Eq, PartialOrd, Ord)]
pub struct WorkerUid(pub Arc<str>);

impl PartialEq for WorkerUid {
    /// Routers look up what they know of a worker many times a decision, mostly by a copy of the key: that needs no look at
    /// the text.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl std::hash::Hash for WorkerUid {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl WorkerUid {
    /// The UID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for WorkerUid {
    fn from(uid: &str) -> Self {
        Self(uid.into())
    }
}

impl fmt::Display for WorkerUid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// One start of one engine; larger than every earlier one of the same worker slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// Number of a batch within (incarnation, rank), from 0, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(pub u64);

/// One data-parallel rank inside an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

/// The rank of a worker slot, whatever its incarnation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKey {
    /// Worker slot.
    pub worker: WorkerUid,
    /// Rank of its engine.
    pub rank: Rank,
}

/// Where a block lies; earlier is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Memory the engine computes in.
    Device,
    /// Memory of the host.
    Host,
    /// A disk of the node.
    Disk,
    /// A store outside the node.
    External,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::External];

    /// Position in [`Tier::ALL`].
    #[must_use]
    pub fn position(self) -> usize {
        self as usize
    }

    /// Number of the tier in `kvist.events.v1.Tier`.
    #[must_use]
    pub fn to_number(self) -> i32 {
        self as i32 + 1
    }

    /// The tier of a number of `kvist.events.v1.Tier`; none for an unknown or unspecified one.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.to_number() == number)
    }
}
