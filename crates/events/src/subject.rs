//! Names of subjects.

use kvist_blocks::WorkerUid;

use crate::EventsError;

/// Subjects of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subjects {
    prefix: String,
}

impl Subjects {
    /// Subjects of a cluster.
    ///
    /// # Errors
    /// The name cannot be part of a subject.
    pub fn new(cluster: &str) -> Result<Self, EventsError> {
        check_token("cluster", cluster)?;
        Ok(Self { prefix: format!("kvist.v1.{cluster}") })
    }

    /// Where the events of a rank travel.
    #[must_use]
    pub fn events(&self, worker_uid: &str, rank: u32) -> String {
        format!("{}.kv.{worker_uid}.{rank}", self.prefix)
    }

    /// Which worker and rank events on a subject are about; none for a subject of another kind.
    #[must_use]
    pub fn speaker<'subject>(&self, subject: &'subject str) -> Option<(&'subject str, u32)> {
        let (worker_uid, rank) = subject.strip_prefix(&self.prefix)?.strip_prefix(".kv.")?.split_once('.')?;
        check_token("worker_uid", worker_uid).ok()?;
        Some((worker_uid, rank.parse().ok()?))
    }

    /// Events of all ranks of all workers.
    #[must_use]
    pub fn all_events(&self) -> String {
        format!("{}.kv.>", self.prefix)
    }

    /// Where the deaths of a worker slot are announced.
    #[must_use]
    pub fn tombstone(&self, worker_uid: &WorkerUid) -> String {
        format!("{}.tombstone.{worker_uid}", self.prefix)
    }

    /// Deaths of all workers.
    #[must_use]
    pub fn all_tombstones(&self) -> String {
        format!("{}.tombstone.>", self.prefix)
    }
}

/// Dots, spaces and wildcards have a meaning in subjects; a name with one of them could speak for somebody else.
pub(crate) fn check_token(field: &'static str, value: &str) -> Result<(), EventsError> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if value.is_empty() || !value.bytes().all(is_plain) {
        return Err(EventsError::Name { field, value: value.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_those_of_the_proto() {
        let subjects = Subjects::new("home").unwrap();
        assert_eq!("kvist.v1.home.kv.w-1.3", subjects.events("w-1", 3));
        assert_eq!("kvist.v1.home.tombstone.w-1", subjects.tombstone(&"w-1".into()));
        assert_eq!("kvist.v1.home.kv.>", subjects.all_events());
        assert_eq!(Some(("w-1", 3)), subjects.speaker("kvist.v1.home.kv.w-1.3"));
        for stranger in
            ["kvist.v1.home.kv.w-1", "kvist.v1.home.kv.w-1.3.4", "kvist.v1.home.kv..3", "kvist.v1.other.kv.w.3"]
        {
            assert_eq!(None, subjects.speaker(stranger), "{stranger}");
        }
        assert_eq!("kvist.v1.home.tombstone.>", subjects.all_tombstones());
    }

    #[test]
    fn names_with_a_meaning_in_subjects_are_refused() {
        for name in ["", "a.b", "a b", "*", ">", "Home", "ö"] {
            assert!(Subjects::new(name).is_err(), "{name}");
        }
    }
}
