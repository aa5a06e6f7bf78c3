//! The contents held against the accounts.

use std::sync::atomic::Ordering::Relaxed;

use kvist_blocks::{BlockHash, Digest, Tier};

use crate::{core::Core, index::Divergence, node::NODE_BLOCKS, source::TierSum};

/// Parts of a round.
pub(crate) const PARTS: u32 = 1024;

impl Core {
    /// Adds up a part of all nodes; at the end of a round, says who differs from its account.
    pub(crate) fn scrub_part(&mut self) -> Vec<Divergence> {
        let end = self.records.lines().end();
        let part = self.scrub_part;
        let to = (u64::from(end) * u64::from(part + 1) / u64::from(PARTS)) as u32 + 1;
        while self.scrub_end < to {
            self.scrub_node(self.scrub_end);
            self.scrub_end += 1;
        }
        self.scrub_part += 1;
        if self.scrub_part < PARTS {
            return Vec::new();
        }
        (self.scrub_part, self.scrub_end) = (0, 0);
        self.compare()
    }

    fn scrub_node(&mut self, number: u32) {
        let Some(node) = self.node(number) else { return };
        self.load_holders(&node);
        let mut leading = [Digest::default(); NODE_BLOCKS as usize + 1];
        for (position, hash) in self.hashes(number, &node).iter().enumerate() {
            leading[position + 1] = leading[position];
            leading[position + 1].add(BlockHash(hash.load(Relaxed)));
        }
        let holders = std::mem::take(&mut self.holders);
        for (who, mask) in holders.all() {
            let mut sum = TierSum::default();
            let mut rest = mask;
            while rest != 0 {
                // Runs of places, each as a difference.
                let from = rest.trailing_zeros();
                let run = (rest >> from).trailing_ones();
                let of = |place: u32| leading[place.min(NODE_BLOCKS) as usize].0;
                sum.digest.0 = sum.digest.0.wrapping_add(of(from + run)).wrapping_sub(of(from));
                sum.count += u64::from(run);
                rest = if from + run >= NODE_BLOCKS { 0 } else { rest >> (from + run) << (from + run) };
            }
            let scrubbed = &mut self.slots[who.slot() as usize].scrubbed[who.tier()];
            *scrubbed = scrubbed.plus(&sum);
        }
        self.holders = holders;
    }

    fn compare(&mut self) -> Vec<Divergence> {
        let mut diverged = Vec::new();
        for position in 0..self.sources.list().len() {
            let Some(source) = self.sources.at(Some(position)) else { continue };
            let account = &mut self.slots[source.slot as usize];
            let mut blocks = 0;
            for tier in 0..Tier::ALL.len() {
                let found = account.scrubbed[tier].plus(&account.given_up[tier]);
                blocks += found.differs_by(&account.applied[tier]);
                let used = account.applied[tier].used;
                account.applied[tier] = TierSum { used, ..found };
            }
            if blocks > 0 {
                (source.catching_up, source.divergent_blocks) = (true, blocks);
                let incarnation = source.incarnation;
                self.show(position);
                let source = self.sources.list().keys()[position].clone();
                diverged.push(Divergence { source, incarnation, blocks });
            }
        }
        self.slots.iter_mut().for_each(|slot| slot.scrubbed = Default::default());
        diverged
    }
}
