//! Ids of long texts between control tokens that conversations send again.
//!
//! A conversation is sent whole with each of its turns, and many begin with the same instructions. Control tokens are
//! hard borders: what lies between two of them is tokenized alike wherever they stand. So the ids of a part are kept
//! with its text and the tokens around it, and found by all of that.
//!
//! What was sent once is not kept, so that texts that do not come again cost no more than their hash. Requests with a cache
//! salt have parts of their own, as they have KV blocks of their own: no other request is faster for what they sent.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Shorter parts are tokenized about as fast as they are found.
pub(crate) const SHORTEST_BYTES: usize = 1024;

/// Most bytes of texts and ids.
const BUDGET_BYTES: usize = 16 << 20;

/// Most bytes of one part: many have to fit.
const LONGEST_COST_BYTES: usize = BUDGET_BYTES / 16;

/// Hashes of parts that were seen once.
const REMEMBERED: usize = 4096;

/// What a part costs beside its text and ids: the entry and two allocations.
const OVERHEAD_BYTES: usize = 128;

/// A part of a rendered conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part<'a> {
    pub(crate) text: &'a str,
    /// The control tokens around it; none at an end. Some take blanks beside them away.
    pub(crate) around: [Option<u32>; 2],
}

/// The hash of a part in the space of a salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

/// Parts that were sent more than once.
#[derive(Debug)]
pub(crate) struct Segments {
    seed: u64,
    kept: Mutex<Kept>,
}

type Generation = HashMap<u64, Arc<Segment>>;

/// Two generations: what is used again stays young, and the old ones go together.
#[derive(Debug)]
struct Kept {
    young: Generation,
    old: Generation,
    young_bytes: usize,
    seen: Box<[u64]>,
}

/// A part with its ids.
#[derive(Debug)]
pub(crate) struct Segment {
    text: Box<str>,
    around: [Option<u32>; 2],
    ids: Box<[u32]>,
}

impl Segment {
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn cost(&self) -> usize {
        cost(&self.text, &self.ids)
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + OVERHEAD_BYTES
}

impl Segments {
    pub(crate) fn new() -> Self {
        let kept =
            Kept { young: Generation::new(), old: Generation::new(), young_bytes: 0, seen: vec![0; REMEMBERED].into() };
        // Nobody outside knows which texts meet in one place.
        Self { seed: RandomState::new().hash_one(0), kept: Mutex::new(kept) }
    }

    pub(crate) fn key(&self, part: Part<'_>, salt: &str) -> Key {
        let around = part.around.map(|id| id.map_or(u64::MAX, u64::from));
        let seed = around.into_iter().fold(self.seed, |seed, id| (seed ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let seed = if salt.is_empty() { seed } else { xxh3_64_with_seed(salt.as_bytes(), seed) };
        Key(xxh3_64_with_seed(part.text.as_bytes(), seed))
    }

    /// A part whose ids are kept.
    pub(crate) fn find(&self, key: Key, part: Part<'_>) -> Option<Arc<Segment>> {
        let (segment, dropped) = self.kept.lock().get(key)?;
        // Outside the lock.
        drop(dropped);
        (*segment.text == *part.text && segment.around == part.around).then_some(segment)
    }

    /// Notes that a part was sent; says whether it was before, so that it should be kept.
    pub(crate) fn was_seen(&self, key: Key) -> bool {
        let mut kept = self.kept.lock();
        let place = (key.0 % REMEMBERED as u64) as usize;
        std::mem::replace(&mut kept.seen[place], key.0) == key.0
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        let kept = self.kept.lock();
        kept.young.len() + kept.old.len()
    }

    pub(crate) fn keep(&self, key: Key, part: Part<'_>, ids: &[u32]) {
        if cost(part.text, ids) > LONGEST_COST_BYTES {
            return;
        }
        let segment = Arc::new(Segment { text: part.text.into(), around: part.around, ids: ids.into() });
        let dropped = self.kept.lock().insert(key, segment);
        // Outside the lock.
        drop(dropped);
    }
}

impl Kept {
    /// A segment, and the generation that had to go for it to stay.
    fn get(&mut self, key: Key) -> Option<(Arc<Segment>, Option<Generation>)> {
        if let Some(segment) = self.young.get(&key.0) {
            return Some((Arc::clone(segment), None));
        }
        let segment = self.old.remove(&key.0)?;
        let dropped = self.insert(key, Arc::clone(&segment));
        Some((segment, dropped))
    }

    /// Returns the generation that had to go.
    fn insert(&mut self, key: Key, segment: Arc<Segment>) -> Option<Generation> {
        let cost = segment.cost();
        let mut dropped = None;
        if self.young_bytes + cost > BUDGET_BYTES / 2 {
            let young = std::mem::take(&mut self.young);
            dropped = Some(std::mem::replace(&mut self.old, young));
            self.young_bytes = 0;
        }
        self.young_bytes += cost;
        if let Some(other) = self.young.insert(key.0, segment) {
            self.young_bytes -= other.cost();
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(text: &str) -> Part<'_> {
        Part { text, around: [Some(1), None] }
    }

    fn known(segments: &Segments, part: Part<'_>, salt: &str) -> Option<Vec<u32>> {
        segments.find(segments.key(part, salt), part).map(|segment| segment.ids().to_vec())
    }

    #[test]
    fn a_part_is_found_by_its_text_its_neighbours_and_its_salt() {
        let segments = Segments::new();
        let key = segments.key(part("text"), "");
        assert!(!segments.was_seen(key));
        assert!(segments.was_seen(key));
        segments.keep(key, part("text"), &[1, 2]);
        assert_eq!(Some(vec![1, 2]), known(&segments, part("text"), ""));
        assert_eq!(None, known(&segments, part("texts"), ""));
        assert_eq!(None, known(&segments, Part { around: [None, Some(1)], ..part("text") }, ""));
        assert_eq!(None, known(&segments, part("text"), "salt"));
        assert!(!segments.was_seen(segments.key(part("text"), "salt")));
    }

    #[test]
    fn another_text_of_the_same_hash_is_none() {
        let segments = Segments::new();
        let key = segments.key(part("text"), "");
        segments.keep(key, part("text"), &[1]);
        assert!(segments.find(key, part("other")).is_none());
    }

    #[test]
    fn the_budget_holds_and_what_is_used_stays() {
        let segments = Segments::new();
        let texts: Vec<String> = (0..400).map(|number| format!("{number} {}", "x".repeat(100_000))).collect();
        let used = part("used");
        segments.keep(segments.key(used, ""), used, &[7]);
        for text in &texts {
            segments.keep(segments.key(part(text), ""), part(text), &[1; 1000]);
            assert!(known(&segments, used, "").is_some());
            let kept = segments.kept.lock();
            let sum = |generation: &Generation| generation.values().map(|segment| segment.cost()).sum::<usize>();
            assert_eq!(sum(&kept.young), kept.young_bytes);
            assert!(sum(&kept.young) + sum(&kept.old) <= BUDGET_BYTES);
        }
        assert_eq!(None, known(&segments, part(&texts[0]), ""));
        assert!(known(&segments, part(&texts[399]), "").is_some());
        // Longer than may be.
        let long = "y".repeat(LONGEST_COST_BYTES);
        segments.keep(segments.key(part(&long), ""), part(&long), &[1]);
        assert_eq!(None, known(&segments, part(&long), ""));
    }
}
