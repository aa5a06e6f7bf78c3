//! What a source holds as runs.

use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

use kvist_blocks::{BlockHash, Run, Tier};

use crate::core::Core;

impl Core {
    /// The runs of a slot by tier, in no particular order.
    pub(crate) fn runs_of(&mut self, slot: u32) -> [Vec<Run>; Tier::ALL.len()] {
        let mut runs: [Vec<Run>; Tier::ALL.len()] = Default::default();
        for number in self.nodes_of(slot) {
            let held = self.held(number, slot);
            let Some(node) = self.node(number) else { continue };
            let hashes: Vec<BlockHash> =
                self.hashes(number, &node).iter().map(|hash| BlockHash(hash.load(Relaxed))).collect();
            for (tier, mut places) in held {
                while places != 0 {
                    let from = places.trailing_zeros() as usize;
                    let to = from + (places >> from).trailing_ones() as usize;
                    let parent = from.checked_sub(1).map_or(node.parent, |before| hashes.get(before).copied());
                    let of_run = hashes.get(from..to).unwrap_or_default().to_vec();
                    runs[tier.position()].push(Run { parent, hashes: of_run });
                    places = places.checked_shr(to as u32).unwrap_or(0).checked_shl(to as u32).unwrap_or(0);
                }
            }
        }
        runs
    }
}

/// Puts each run behind the one that has its parent, so that who takes them in can append.
pub(crate) fn in_order(runs: Vec<Run>) -> Vec<Run> {
    let run_of: HashMap<BlockHash, usize> =
        runs.iter().enumerate().flat_map(|(number, run)| run.hashes.iter().map(move |hash| (*hash, number))).collect();
    let mut children: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut waiting = Vec::new();
    for (number, run) in runs.iter().enumerate().rev() {
        match run.parent.and_then(|parent| run_of.get(&parent)).filter(|parent| **parent != number) {
            Some(parent) => children.entry(*parent).or_default().push(number),
            None => waiting.push(number),
        }
    }
    let mut order = Vec::with_capacity(runs.len());
    let mut is_placed = vec![false; runs.len()];
    // Whoever has told that two runs are each before the other has both at the end.
    let mut others = 0..runs.len();
    while let Some(number) = waiting.pop().or_else(|| others.find(|number| !is_placed[*number])) {
        if !std::mem::replace(&mut is_placed[number], true) {
            order.push(number);
            waiting.extend(children.remove(&number).unwrap_or_default());
        }
    }
    let mut runs: Vec<Option<Run>> = runs.into_iter().map(Some).collect();
    order.into_iter().filter_map(|number| runs[number].take()).collect()
}
