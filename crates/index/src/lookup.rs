//! Look-ups, which wait for nobody.
//!
//! A look-up walks along the prompt, then reads what each source says of itself, then looks whether all that it has walked
//! through is the same. If it is, the walk was true at the moment when the sources were read, so each claim is true at the
//! position that its source states. If not, it walks again, a few times. What goes on changing, or stands still in the middle of a change since
//! its writer has lost its core, is not waited for: nothing is claimed of the sources that it concerns.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use kvist_blocks::BlockHash;

use crate::{
    index::Index,
    overlaps::Overlaps,
    sources::{Cell, Seen, SourceList, Unread},
    walk::{Met, Walk},
};

/// Walks of one look-up.
const TRIES: usize = 6;
/// Pauses of one walk, all sources together, for a batch to end. A small one takes half a microsecond.
const PAUSES: usize = 100;

thread_local! {
    /// Memory for the nodes that the thread's look-ups meet.
    static NODES: RefCell<Vec<Met>> = const { RefCell::new(Vec::new()) };
}

impl Index {
    /// For every source, how much of the beginning of a prompt it holds; by worker and rank.
    ///
    /// Takes one step for up to 128 blocks, up to the first block that no source has in an unbroken run, and never waits for a writer. A
    /// source in the middle of a batch is known as it was before; it is CATCHING_UP, and nothing is claimed of it, if the batch has
    /// already changed what the prompt meets.
    #[must_use]
    pub fn lookup(&self, prompt: &[BlockHash]) -> Overlaps {
        NODES.with_borrow_mut(|nodes| self.lookup_with(prompt, nodes))
    }

    fn lookup_with(&self, prompt: &[BlockHash], nodes: &mut Vec<Met>) -> Overlaps {
        let mut tries = TRIES;
        loop {
            tries -= 1;
            let view = self.published.get();
            let mut walk = Walk::new(nodes);
            walk.go(&view, prompt);
            fence(Ordering::Acquire);
            let Some(mut seen) = seen(&view.sources, walk.newest(), tries == 0) else { continue };
            let spoiled_at = walk.spoiled_at(&view);
            fence(Ordering::Acquire);
            let spoiled_at = if self.published.is_current(&view) { spoiled_at } else { Some(0) };
            if spoiled_at.is_some() && tries > 0 {
                (0..PAUSES / 10).for_each(|_| std::hint::spin_loop());
                continue;
            }
            let reached = walk.reached();
            if let Some(depth) = spoiled_at {
                // Who ended before is known; of the others, more or less may be true.
                let is_spoiled = |seen: &Seen| reached.blocks_of(seen.slot()).1 >= depth;
                seen.iter_mut()
                    .filter(|seen| is_spoiled(seen))
                    .for_each(|seen| *seen = Seen::unknown(seen.incarnation));
            }
            return Overlaps::new(Arc::clone(&view.sources), seen, reached);
        }
    }
}

/// What the sources say of themselves. None when the list of sources is an old one, unless it has to do.
fn seen(sources: &SourceList, newest_met: u64, is_last_try: bool) -> Option<Vec<Seen>> {
    let mut pauses = PAUSES;
    let mut is_retired = false;
    let before_batch = sources.before_batch();
    let read = |cell: &Cell| match cell.read(newest_met, before_batch) {
        Ok(seen) => seen,
        Err(unread) => read_again(cell, newest_met, before_batch, unread, &mut pauses).unwrap_or_else(|unread| {
            is_retired |= matches!(unread, Unread::Retired(_));
            let (Unread::Busy(incarnation) | Unread::Retired(incarnation)) = unread;
            Seen::unknown(incarnation)
        }),
    };
    let seen = sources.cells().iter().map(read).collect();
    (!is_retired || is_last_try).then_some(seen)
}

/// Gives a batch that has changed what was walked through a little time to end.
#[cold]
fn read_again(
    cell: &Cell,
    newest_met: u64,
    before_batch: &AtomicU64,
    mut unread: Unread,
    pauses: &mut usize,
) -> Result<Seen, Unread> {
    while *pauses > 0 && matches!(unread, Unread::Busy(_)) {
        *pauses -= 1;
        std::hint::spin_loop();
        match cell.read(newest_met, before_batch) {
            Ok(seen) => return Ok(seen),
            Err(other) => unread = other,
        }
    }
    Err(unread)
}
