//! The walk along a prompt.

use crate::sets::{LaneKey, Lanes, SetId};

/// How far each source holds a prompt.
pub(crate) struct Walk {
    /// Blocks that somebody holds without a break.
    pub(crate) depth: usize,
    /// Of these, blocks of which it is not known how they follow others.
    pub(crate) alone: usize,
    /// The set of the block before.
    last: Option<SetId>,
    /// Those that hold every block so far in one tier, as a set.
    keys: Vec<LaneKey>,
    masks: Vec<u64>,
    /// Those that hold every block so far in some tier, by word.
    any: Vec<(u32, u64)>,
    /// Whether somebody holds blocks in more than one tier, so that `any` is more than `masks`.
    has_tiers: bool,
    /// By slot: leading blocks in each tier, and in any.
    reached: Vec<[u32; 5]>,
}

impl Walk {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            depth: 0,
            alone: 0,
            last: None,
            keys: Vec::new(),
            masks: Vec::new(),
            any: Vec::new(),
            has_tiers: false,
            reached: vec![[0; 5]; slots],
        }
    }

    pub(crate) fn tier_blocks(&self, slot: u32) -> [u32; 4] {
        self.reached
            .get(slot as usize)
            .map_or([0; 4], |[device, host, disk, external, _]| [*device, *host, *disk, *external])
    }

    pub(crate) fn matched_blocks(&self, slot: u32) -> u32 {
        self.reached.get(slot as usize).map_or(0, |reached| reached[4])
    }

    /// Whether nobody holds the next block.
    pub(crate) fn is_over(&self) -> bool {
        self.any.is_empty()
    }

    /// Takes in the holders of the block behind `depth` others. `live` has a bit for each slot that may be seen.
    pub(crate) fn meet(&mut self, depth: usize, set: SetId, lanes: Lanes<'_>, live: &[u64]) {
        let Some(last) = self.last.replace(set) else { return self.begin(lanes, live) };
        if last != set {
            self.keep(depth, lanes);
        }
    }

    /// Writes down how far those have come that hold everything up to `depth`.
    pub(crate) fn finish(&mut self) {
        self.keep(self.depth, Lanes::default());
    }

    fn begin(&mut self, lanes: Lanes<'_>, live: &[u64]) {
        for (key, mask) in lanes.iter() {
            let mask = mask & live.get(key.word() as usize).copied().unwrap_or(0);
            if mask == 0 {
                continue;
            }
            self.keys.push(key);
            self.masks.push(mask);
            match self.any.last_mut() {
                Some((word, any)) if *word == key.word() => {
                    *any |= mask;
                    self.has_tiers = true;
                }
                _ => self.any.push((key.word(), mask)),
            }
        }
    }

    /// Ends the run of all that are not in a set.
    fn keep(&mut self, depth: usize, lanes: Lanes<'_>) {
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        // The common case first: the same words, and hardly anybody leaves.
        if !self.has_tiers && self.keys == lanes.keys {
            let mut is_empty = false;
            for (at, held) in lanes.masks.iter().enumerate() {
                let ended = self.masks[at] & !held;
                if ended != 0 {
                    let key = self.keys[at];
                    self.masks[at] &= held;
                    self.any[at].1 = self.masks[at];
                    is_empty |= self.masks[at] == 0;
                    end(&mut self.reached, key.word(), ended, |reached| {
                        (reached[key.tier()], reached[4]) = (depth, depth)
                    });
                }
            }
            if is_empty {
                self.drop_empty();
            }
            return;
        }
        let mut rest = lanes.iter().peekable();
        let mut held_in_any = lanes.iter().peekable();
        for (key, mask) in self.keys.iter().zip(&mut self.masks) {
            while rest.next_if(|(other, _)| other < key).is_some() {}
            let held = rest.next_if(|(other, _)| other == key).map_or(0, |(_, held)| held);
            end(&mut self.reached, key.word(), *mask & !held, |reached| reached[key.tier()] = depth);
            *mask &= held;
        }
        for (word, any) in &mut self.any {
            let mut held = 0;
            while let Some((key, mask)) = held_in_any.next_if(|(key, _)| key.word() <= *word) {
                held |= if key.word() == *word { mask } else { 0 };
            }
            end(&mut self.reached, *word, *any & !held, |reached| reached[4] = depth);
            *any &= held;
        }
        self.drop_empty();
        // Once one tier has broken off, another may go on.
        self.has_tiers = !self.masks.iter().eq(self.any.iter().map(|(_, any)| any));
    }

    fn drop_empty(&mut self) {
        self.any.retain(|(_, any)| *any != 0);
        let mut masks = self.masks.iter();
        self.keys.retain(|_| masks.next().is_some_and(|mask| *mask != 0));
        self.masks.retain(|mask| *mask != 0);
    }
}

fn end(reached: &mut [[u32; 5]], word: u32, mut ended: u64, write: impl Fn(&mut [u32; 5])) {
    while ended != 0 {
        if let Some(reached) = reached.get_mut(word as usize * 64 + ended.trailing_zeros() as usize) {
            write(reached);
        }
        ended &= ended - 1;
    }
}
