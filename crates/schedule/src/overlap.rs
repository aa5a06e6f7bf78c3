//! What an index and a router's own recent decisions say of a prompt, as a decision takes it.

use std::{cmp::Ordering, time::Duration};

use kvist_blocks::Tier;
use kvist_index::{Overlap, Overlaps};

use crate::{Cached, TargetId};

/// How long a decision stands for blocks that an exact index does not show: about the time that a prompt waits and is
/// computed. After that the index is right.
const RECENT_BESIDE_EXACT: Duration = Duration::from_secs(10);

/// How long it does so while the index does not speak for the present, as when the event plane is down.
const RECENT_WITHOUT_EXACT: Duration = Duration::from_secs(120);

/// How old a recent decision may be to count beside what the index knows.
#[must_use]
pub fn recent_is_valid_for(is_exact: bool) -> Duration {
    if is_exact { RECENT_BESIDE_EXACT } else { RECENT_WITHOUT_EXACT }
}

/// Reads what sources hold for one target after the other. Targets in the order of sources, which they mostly have, cost a
/// comparison each; others are searched for.
#[derive(Debug)]
pub struct OverlapCursor<'a> {
    overlaps: &'a Overlaps,
    /// Of the next source.
    position: usize,
}

impl<'a> OverlapCursor<'a> {
    /// At the first source.
    #[must_use]
    pub fn new(overlaps: &'a Overlaps) -> Self {
        Self { overlaps, position: 0 }
    }

    /// What a target holds; none when no source speaks of it.
    pub fn get(&mut self, target: &TargetId) -> Option<Overlap> {
        while let Some(key) = self.overlaps.source(self.position) {
            match (&key.worker, key.rank).cmp(&(&target.worker, target.rank)) {
                Ordering::Less => self.position += 1,
                Ordering::Equal => {
                    self.position += 1;
                    return self.overlaps.at(self.position - 1);
                }
                Ordering::Greater => break,
            }
        }
        self.overlaps.get(&target.worker, target.rank)
    }
}

/// What is known of a prompt in a cache: what the index claims, and what recent decisions make likely. It is all that is
/// held only where the index is exact. None when nothing is known.
///
/// `usable` blocks of the prompt could be served by a cache; a target may hold more of it.
#[must_use]
pub fn cached_prompt(
    overlap: Option<Overlap>,
    recent_blocks: usize,
    usable: usize,
    block_size_tokens: usize,
) -> Option<Cached> {
    if overlap.is_none() && recent_blocks == 0 {
        return None;
    }
    let tokens = |blocks: u32| ((blocks as usize).min(usable) * block_size_tokens) as u64;
    let mut tier_tokens = overlap.map_or([0; 4], |overlap| overlap.tier_blocks.map(tokens));
    let matched = overlap.map_or(0, |overlap| tokens(overlap.matched_blocks));
    let recent = (recent_blocks.min(usable) * block_size_tokens) as u64;
    if recent > matched {
        tier_tokens[Tier::Device.position()] = recent;
    }
    Some(Cached {
        tier_tokens,
        matched_tokens: matched.max(recent),
        is_complete: overlap.is_some_and(|overlap| overlap.state.is_exact()),
    })
}

#[cfg(test)]
mod tests {
    use kvist_blocks::{Incarnation, Rank, SourceKey};
    use kvist_index::{Index, IndexSettings, SourceState};

    use super::*;

    #[test]
    fn a_claim_is_complete_only_when_it_is_exact_and_recent_decisions_add_to_it() {
        let overlap = |state| Overlap {
            incarnation: Incarnation(1),
            state,
            applied_sequence: Some(1),
            tier_blocks: [2, 5, 0, 0],
            matched_blocks: 5,
        };
        let cached =
            |tier_tokens, matched_tokens, is_complete| Some(Cached { tier_tokens, matched_tokens, is_complete });
        let exact = overlap(SourceState::Exact);
        assert_eq!(cached([32, 80, 0, 0], 80, true), cached_prompt(Some(exact), 4, 9, 16));
        assert_eq!(cached([32, 64, 0, 0], 64, true), cached_prompt(Some(exact), 0, 4, 16));
        assert_eq!(cached([96, 80, 0, 0], 96, true), cached_prompt(Some(exact), 6, 9, 16));
        assert_eq!(cached([32, 80, 0, 0], 80, false), cached_prompt(Some(overlap(SourceState::Stale)), 0, 9, 16));
        assert_eq!(cached([48, 0, 0, 0], 48, false), cached_prompt(None, 3, 9, 16));
        assert_eq!(None, cached_prompt(None, 0, 9, 16));
    }

    #[test]
    fn a_cursor_finds_what_a_search_finds_in_any_order() {
        let index = Index::new(IndexSettings { byte_budget: 1 << 20 });
        let target = |name: &str, rank| TargetId { worker: name.into(), rank: Rank(rank) };
        let known = [target("a", 0), target("a", 1), target("c", 0), target("d", 0)];
        for (number, one) in known.iter().enumerate() {
            let key = SourceKey { worker: one.worker.clone(), rank: one.rank };
            index.expect_source(&key, Incarnation(number as u64 + 1));
        }
        let overlaps = index.lookup(&[]);
        let all = [known.to_vec(), vec![target("b", 0), target("e", 0), target("a", 2)]].concat();
        for first in &all {
            for second in &all {
                for third in &all {
                    let mut cursor = OverlapCursor::new(&overlaps);
                    for one in [first, second, third] {
                        assert_eq!(overlaps.get(&one.worker, one.rank), cursor.get(one));
                    }
                }
            }
        }
    }
}
