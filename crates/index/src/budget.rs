//! What is given up when there is no room.
//!
//! Look-ups mark the nodes they pass. A hand goes around and takes the mark away; what it finds unmarked has not been asked for
//! since it came by last, and is given up. A source that has its fair share already gives up of its own, and the others
//! give up of those that have more than theirs: so a newcomer finds room, and a giant does not push out what others use.

use kvist_blocks::BlockHash;

use crate::{
    core::Core,
    node::{is_touched, set_touched},
    source::SlotUse,
};

/// Nodes that are looked at for one that is given up.
const MOST_STEPS: u32 = 64;

impl Core {
    /// Gives up a node so that a slot may have its room; false when none is found within some steps.
    pub(crate) fn evict(&mut self, slot: u32) -> bool {
        if let Some((number, parent)) = self.unreachable.take()
            && self.is_unreachable(number, parent)
        {
            self.give_up_node(number);
            return true;
        }
        if self.has_fair_share(slot) { self.evict_own(slot) } else { self.evict_any() }
    }

    /// Whether a node is still behind a block that was given up, and has not come back since.
    fn is_unreachable(&mut self, number: u32, parent: BlockHash) -> bool {
        let Some(node) = self.node(number).filter(|node| node.parent == Some(parent)) else { return false };
        if self.pinned.contains(&number) {
            return false;
        }
        self.load_holders(&node);
        let holder = self.holders.all().next().map(|(who, _)| who.slot());
        holder.is_none_or(|slot| self.place_of(slot, parent).is_none_or(|seat| !self.holds(seat, slot)))
    }

    /// Whether a slot holds at least as much as the average of those that hold something.
    fn has_fair_share(&self, slot: u32) -> bool {
        let all: u64 = self.counters.holders.load(std::sync::atomic::Ordering::Relaxed);
        self.slots[slot as usize].pairs * self.holding_slots >= all
    }

    /// Of the nodes that the slot holds alone, the oldest that nobody has asked for since it was looked at last.
    fn evict_own(&mut self, slot: u32) -> bool {
        for _ in 0..MOST_STEPS {
            let Some(number) = self.pop_listed(slot) else { return false };
            if self.pinned.contains(&number) {
                if !self.renew_listed(slot, number) {
                    return false;
                }
                continue;
            }
            let Some(node) = self.node(number) else { continue };
            self.load_holders(&node);
            if self.holders.shares(slot).own_any() == 0 {
                continue;
            }
            let is_alone = self.holders.only_slot() == Some(slot);
            let is_unused = is_alone && self.pass(number);
            // What can not be put behind the others has to go, used or not.
            let is_renewed = !is_unused && self.renew_listed(slot, number);
            if is_alone && !is_renewed {
                self.give_up_node(number);
                return true;
            }
        }
        false
    }

    /// Of all nodes, the next one that nobody has asked for and that somebody holds who has a fair share.
    fn evict_any(&mut self) -> bool {
        let end = self.records.lines().end();
        for _ in 0..MOST_STEPS {
            let number = self.next_node(end);
            if number == 0 {
                return false;
            }
            let Some(node) = self.node(number).filter(|_| !self.pinned.contains(&number)) else { continue };
            self.load_holders(&node);
            let holder = self.holders.all().next().map(|(who, _)| who.slot());
            let is_rich = holder
                .is_some_and(|slot| self.slots[slot as usize].used_for == SlotUse::Dead || self.has_fair_share(slot));
            if is_rich && self.pass(number) {
                self.give_up_node(number);
                return true;
            }
        }
        false
    }

    /// The node at the hand, which moves on; 0 when there is none.
    fn next_node(&mut self, end: u32) -> u32 {
        for _ in 0..=end {
            let number = self.hand;
            self.hand = if number >= end { 1 } else { number + 1 };
            if self.records.order_of(number.wrapping_sub(1)).is_some() {
                return number;
            }
        }
        0
    }

    /// Whether nobody has asked for a node since the hand was here.
    fn pass(&self, number: u32) -> bool {
        let Some(record) = self.record(number) else { return false };
        let was_touched = is_touched(record);
        set_touched(record, false);
        !was_touched
    }
}
