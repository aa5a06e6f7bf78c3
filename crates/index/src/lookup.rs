//! Look-ups, which wait for nobody.
//!
//! A look-up walks along the prompt, then reads what each source says of itself, then looks whether all that it has walked
//! through is the same. If it is, the walk was true at the moment when the sources were read, so each claim is true at the
//! position that its source states. If not, it walks again, a few times. What goes on changing, or stands still in the middle of a change since
//! its writer has lost its core, is not waited for: nothing is claimed of the sources that it concerns.

use std::sync::atomic::{Ordering, fence};

use kvist_blocks::{BlockHash, Incarnation};

use crate::{
    index::Index,
    source::{Overlap, SourceState},
    sources::{Cell, Overlaps, Seen, SourceList, Unread},
    walk::Walk,
};

/// Walks of one look-up.
const TRIES: usize = 6;
/// Pauses of one walk, all sources together, for a batch to end. A small one takes half a microsecond.
const PAUSES: usize = 100;

impl Index {
    /// For every source, how much of the beginning of a prompt it holds; by worker and rank.
    ///
    /// Takes one step for up to 128 blocks, up to the first block that no source has in an unbroken run, and never waits for a writer. A
    /// source in the middle of a change is CATCHING_UP, and nothing is claimed of it.
    #[must_use]
    pub fn lookup(&self, prompt: &[BlockHash]) -> Overlaps {
        let mut tries = TRIES;
        loop {
            tries -= 1;
            let view = self.published.get();
            let mut walk = Walk::new();
            walk.go(&view, prompt);
            fence(Ordering::Acquire);
            let Some(mut overlaps) = overlaps(&view.sources, &walk, tries == 0) else { continue };
            let spoiled_at = walk.spoiled_at(&view);
            if let Some(depth) = spoiled_at {
                if tries > 0 {
                    (0..PAUSES / 10).for_each(|_| std::hint::spin_loop());
                    continue;
                }
                // Who ended before is known; of the others, more or less may be true.
                overlaps.iter_mut().filter(|overlap| overlap.matched_blocks >= depth).for_each(|overlap| {
                    *overlap = unknown(overlap.incarnation);
                });
            }
            return Overlaps::new(view.sources.keys().clone(), overlaps);
        }
    }
}

/// What a walk has found for each source. None when the list of sources is an old one, unless it has to do.
fn overlaps(sources: &SourceList, walk: &Walk, is_last_try: bool) -> Option<Vec<Overlap>> {
    let mut pauses = PAUSES;
    let mut is_retired = false;
    let mut overlaps = Vec::with_capacity(sources.len());
    let reached = walk.reached();
    for cell in sources.cells() {
        let seen = match cell.read() {
            Ok(seen) => Ok(seen),
            Err(unread) => read_again(cell, unread, &mut pauses),
        };
        overlaps.push(match seen {
            Ok(seen) => {
                let (tier_blocks, matched_blocks) = reached.blocks_of(seen.slot);
                Overlap {
                    incarnation: seen.incarnation,
                    state: seen.state,
                    applied_sequence: seen.next_sequence.checked_sub(1),
                    tier_blocks,
                    matched_blocks,
                }
            }
            Err(unread) => {
                is_retired |= matches!(unread, Unread::Retired(_));
                let (Unread::Busy(incarnation) | Unread::Retired(incarnation)) = unread;
                unknown(incarnation)
            }
        });
    }
    (!is_retired || is_last_try).then_some(overlaps)
}

/// Gives a batch a little time to end.
#[cold]
fn read_again(cell: &Cell, mut unread: Unread, pauses: &mut usize) -> Result<Seen, Unread> {
    while *pauses > 0 && matches!(unread, Unread::Busy(_)) {
        *pauses -= 1;
        std::hint::spin_loop();
        match cell.read() {
            Ok(seen) => return Ok(seen),
            Err(other) => unread = other,
        }
    }
    Err(unread)
}

/// Before its first batch, a source holds nothing: that is true of each.
fn unknown(incarnation: Incarnation) -> Overlap {
    Overlap {
        incarnation,
        state: SourceState::CatchingUp,
        applied_sequence: None,
        tier_blocks: [0; 4],
        matched_blocks: 0,
    }
}
