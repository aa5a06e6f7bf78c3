//! Pieces of memory for what is to be held, within the budget.

use std::sync::Arc;

use kvist_blocks::BlockHash;

use crate::{
    arena::NO_LINE,
    core::Core,
    node::{self, MAX_SLOTS},
    table::{MAX_NODES, PAGE_ORDER, Room, Seat},
};

/// Nodes that may be given up for one piece of memory.
pub(crate) const MOST_VICTIMS: usize = 4;

/// Of which arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Records,
    /// Hashes and holders.
    Words,
    /// Of the table.
    Pages,
    /// Lists of nodes, which stay longer than what lies around them.
    Lists,
}

impl Core {
    pub(crate) fn has_room(&self, growth_bytes: u64) -> bool {
        self.bytes() + growth_bytes <= self.byte_budget
    }

    /// A piece of memory for what a slot wants to hold; something else may be given up for it.
    pub(crate) fn take(&mut self, kind: Kind, order: u32, slot: u32) -> Option<u32> {
        if slot >= MAX_SLOTS {
            return None;
        }
        for victims in 0..=MOST_VICTIMS {
            let arena = match kind {
                Kind::Records => &mut self.records,
                Kind::Words => &mut self.words,
                Kind::Lists => &mut self.lists,
                Kind::Pages => &mut self.pages,
            };
            if order > arena.most_order() {
                return None;
            }
            if let Some(line) = arena.take(order) {
                return Some(line);
            }
            let growth = arena.chunk_bytes();
            let is_numbered = kind != Kind::Records || arena.lines().end() + (1 << arena.most_order()) < MAX_NODES;
            if is_numbered && self.has_room(growth) {
                match kind {
                    Kind::Records => self.records.grow(node::mark_free),
                    Kind::Words => self.words.grow(|_| {}),
                    Kind::Lists => self.lists.grow(|_| {}),
                    Kind::Pages => self.pages.grow(node::mark_free),
                }
                self.publish();
            } else if victims == MOST_VICTIMS || !self.make_room(slot) {
                return None;
            }
        }
        None
    }

    pub(crate) fn give_back(&mut self, line: u32) {
        if line == NO_LINE {
            return;
        }
        self.words.give_back(line);
        if self.words.has_spare(false) {
            self.words.release_spare();
            self.publish();
        }
    }

    pub(crate) fn give_back_list_line(&mut self, line: u32) {
        self.lists.give_back(line);
        self.release_list_lines();
    }

    pub(crate) fn release_list_lines(&mut self) {
        if self.lists.has_spare(false) {
            self.lists.release_spare();
            self.publish();
        }
    }

    /// Takes a node's record back; it stays marked as changing.
    pub(crate) fn free_record(&mut self, number: u32) {
        self.records.give_back(number - 1);
        if self.records.has_spare(false) {
            self.records.release_spare();
            self.publish();
        }
    }

    /// Chunks that nothing is in, for whoever needs another kind.
    pub(crate) fn release_spares(&mut self) -> bool {
        let mut is_released = false;
        while self.words.has_spare(true) {
            self.words.release_spare();
            is_released = true;
        }
        while self.lists.has_spare(true) {
            self.lists.release_spare();
            is_released = true;
        }
        while self.pages.has_spare(true) {
            self.pages.release_spare();
            is_released = true;
        }
        while self.records.has_spare(true) {
            self.records.release_spare();
            is_released = true;
        }
        if is_released {
            self.publish();
        }
        is_released
    }

    /// Makes sure that a hash has room in the table.
    pub(crate) fn make_table_room(&mut self, hash: BlockHash, slot: u32) -> bool {
        let mut victims = 0;
        loop {
            let (room, is_first) =
                (self.table.room(self.pages.lines(), hash, self.pages.taken()), self.table.is_empty());
            match room {
                Room::Enough => return true,
                Room::Never => return false,
                Room::Directory(bytes) if self.has_room(bytes) && !is_first => {
                    self.table.grow();
                    self.publish();
                }
                Room::Directory(bytes) if !self.has_room(bytes) => {
                    if victims == MOST_VICTIMS || !self.make_room(slot) {
                        return false;
                    }
                    victims += 1;
                }
                Room::Directory(_) | Room::Page => {
                    let Some(page) = self.take(Kind::Pages, PAGE_ORDER, slot) else { return false };
                    // Something may have been given up for it, and the table be another.
                    if is_first && self.table.is_empty() && self.has_room(size_of::<u32>() as u64) {
                        let old = Arc::clone(self.table.directory());
                        self.table.start(self.pages.lines(), page, &mut self.versions);
                        self.publish();
                        old.retire();
                    } else if self.table.room(self.pages.lines(), hash, self.pages.taken()) == Room::Page {
                        self.table.split(self.pages.lines(), hash, page, &mut self.versions);
                    } else {
                        self.pages.give_back(page);
                        victims += 1;
                        if victims > MOST_VICTIMS {
                            return false;
                        }
                    }
                }
            }
        }
    }

    /// Takes a hash out of the table.
    pub(crate) fn forget(&mut self, hash: BlockHash, seat: Seat) {
        if let Some(page) = self.table.remove(self.pages.lines(), hash, seat, &mut self.versions) {
            self.give_back_page(page);
        }
    }

    /// Keeps pages together, so that chunks become free.
    fn give_back_page(&mut self, page: u32) {
        let last = self.pages.last(PAGE_ORDER).filter(|last| *last > page && !self.table.is_empty());
        if let Some(last) = last {
            self.table.move_page(self.pages.lines(), last, page, &mut self.versions);
        }
        self.pages.give_back(last.unwrap_or(page));
        let is_smaller = self.table.shrink(self.pages.lines(), self.pages.taken());
        if self.pages.has_spare(false) {
            self.pages.release_spare();
        } else if !is_smaller && !self.table.is_empty() {
            return;
        }
        self.publish();
    }
}
