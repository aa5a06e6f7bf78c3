//! By slot, the nodes of which it holds something, oldest first: what a source that goes leaves behind is found without a
//! search, and so is what it has not used for long.
//!
//! A list may name a node that the slot has left, or that is another by now, and may name one twice; who reads it looks
//! at the node. It is written anew when most of it is old.

use std::{collections::HashSet, sync::atomic::Ordering::Relaxed};

use crate::{
    arena::{LINE_WORDS, NO_LINE},
    core::Core,
    memory::Kind,
};

/// Nodes of a line of a list; its first word has the next line and how many there are.
const LINE_NODES: u32 = (LINE_WORDS as u32 - 1) * 2;

/// A list: its first and last line, and how many nodes of the first are gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    gone: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NO_LINE, last: NO_LINE, gone: 0, len: 0 }
    }
}

impl Core {
    /// Adds a node to the list of a slot; false when there is no room. Until the slot holds something of the node, it must be
    /// pinned.
    pub(crate) fn enlist(&mut self, slot: u32, node: u32) -> bool {
        if !self.has_list_room(slot) {
            let Some(line) = self.take(Kind::Lists, 0, slot) else { return false };
            self.add_list_line(slot, line);
        }
        self.push_listed(slot, node);
        true
    }

    /// Makes sure that the list of a slot has a place for another node, if nothing has to be given up for it.
    fn make_spare_list_room(&mut self, slot: u32) -> bool {
        if self.has_list_room(slot) {
            return true;
        }
        let Some(line) = self.lists.take(0) else { return false };
        self.add_list_line(slot, line);
        true
    }

    fn has_list_room(&self, slot: u32) -> bool {
        let last = self.slots[slot as usize].list.last;
        last != NO_LINE && self.line_len(last) < LINE_NODES
    }

    fn add_list_line(&mut self, slot: u32, line: u32) {
        self.set_line(line, NO_LINE, 0);
        let list = &mut self.slots[slot as usize].list;
        let last = std::mem::replace(&mut list.last, line);
        if list.first == NO_LINE {
            (list.first, list.gone) = (line, 0);
        } else {
            self.set_line(last, line, self.line_len(last));
        }
    }

    /// Adds a node to a list that has a place for it.
    fn push_listed(&mut self, slot: u32, node: u32) {
        let line = self.slots[slot as usize].list.last;
        let len = self.line_len(line);
        if let Some(words) = self.lists.lines().line(line) {
            let (word, shift) = (1 + len as usize / 2, len % 2 * 32);
            let other = words[word].load(Relaxed) & !(0xffff_ffff << shift);
            words[word].store(other | u64::from(node) << shift, Relaxed);
            self.set_line(line, self.next_line(line), len + 1);
            self.slots[slot as usize].list.len += 1;
        }
    }

    /// Takes the oldest node off the list of a slot.
    pub(crate) fn pop_listed(&mut self, slot: u32) -> Option<u32> {
        loop {
            let list = self.slots[slot as usize].list;
            if list.first == NO_LINE {
                return None;
            }
            if list.gone < self.line_len(list.first) {
                let list = &mut self.slots[slot as usize].list;
                let (line, position) = (list.first, list.gone);
                list.gone += 1;
                list.len -= 1;
                return Some(self.listed_at(line, position));
            }
            let next = self.next_line(list.first);
            let list = &mut self.slots[slot as usize].list;
            let empty = std::mem::replace(&mut list.first, next);
            list.gone = 0;
            if next == NO_LINE {
                *list = List::default();
            }
            self.give_back_list_line(empty);
        }
    }

    /// Makes the oldest node of a list, just taken off it, the newest; false when there is no room for that.
    pub(crate) fn renew_listed(&mut self, slot: u32, node: u32) -> bool {
        let has_room = self.make_spare_list_room(slot);
        if has_room {
            self.push_listed(slot, node);
        } else {
            // It was the first, and its place is still there.
            let list = &mut self.slots[slot as usize].list;
            if list.first != NO_LINE && list.gone > 0 {
                list.gone -= 1;
                list.len += 1;
            }
        }
        has_room
    }

    /// All nodes of which a slot holds something, oldest first.
    pub(crate) fn nodes_of(&mut self, slot: u32) -> Vec<u32> {
        let List { first, gone, len, .. } = self.slots[slot as usize].list;
        let mut nodes = Vec::with_capacity(len as usize);
        let (mut line, mut from) = (first, gone);
        while line != NO_LINE {
            nodes.extend((from..self.line_len(line)).map(|position| self.listed_at(line, position)));
            (line, from) = (self.next_line(line), 0);
        }
        let mut known = HashSet::with_capacity(nodes.len());
        nodes.retain(|number| known.insert(*number) && (self.pinned.contains(number) || self.is_in(*number, slot)));
        nodes
    }

    /// Writes the list of a slot anew if most of it is old.
    pub(crate) fn tidy_list(&mut self, slot: u32) {
        let account = &self.slots[slot as usize];
        if account.list.len <= account.nodes * 2 + LINE_NODES * 2 {
            return;
        }
        let nodes = self.nodes_of(slot);
        let old = std::mem::take(&mut self.slots[slot as usize].list);
        let mut line = old.first;
        while line != NO_LINE {
            let next = self.next_line(line);
            self.lists.give_back(line);
            line = next;
        }
        for node in nodes {
            // There is room: more lines were given back.
            if self.make_spare_list_room(slot) {
                self.push_listed(slot, node);
            }
        }
        self.release_list_lines();
    }

    /// Whether a slot holds something of a node, if that is one.
    pub(crate) fn is_in(&mut self, number: u32, slot: u32) -> bool {
        let Some(node) = self.node(number) else { return false };
        self.load_holders(&node);
        self.holders.shares(slot).own_any() != 0
    }

    fn line_len(&self, line: u32) -> u32 {
        self.lists.lines().line(line).map_or(0, |words| (words[0].load(Relaxed) >> 32) as u32)
    }

    fn next_line(&self, line: u32) -> u32 {
        self.lists.lines().line(line).map_or(NO_LINE, |words| words[0].load(Relaxed) as u32)
    }

    fn listed_at(&self, line: u32, position: u32) -> u32 {
        let words = self.lists.lines().line(line);
        words.map_or(0, |words| (words[1 + position as usize / 2].load(Relaxed) >> (position % 2 * 32)) as u32)
    }

    fn set_line(&self, line: u32, next: u32, len: u32) {
        if let Some(words) = self.lists.lines().line(line) {
            words[0].store(u64::from(next) | u64::from(len) << 32, Relaxed);
        }
    }
}
