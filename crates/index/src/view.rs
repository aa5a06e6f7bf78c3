//! What readers know: the memory there is, and who is a source. Replaced as a whole when one of its parts is another.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

use parking_lot::RwLock;

use crate::{arena::Lines, sources::SourceList, table::Directory};

/// One state of the parts. What the parts hold goes on changing.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// Grows from one to the next; [`Published`] sets it.
    pub(crate) number: u64,
    pub(crate) records: Arc<Lines>,
    pub(crate) words: Arc<Lines>,
    pub(crate) pages: Arc<Lines>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) sources: Arc<SourceList>,
}

/// The newest view, twice: the writer replaces one after the other, so that a reader always gets one of them at once,
/// even if the writer is stopped in the middle.
#[derive(Debug)]
pub(crate) struct Published {
    copies: [RwLock<Arc<View>>; 2],
    /// The number of the view that is both of them, or was when the writer last ended.
    number: AtomicU64,
}

impl Published {
    pub(crate) fn new(view: View) -> Self {
        let (number, view) = (AtomicU64::new(view.number), Arc::new(view));
        Self { copies: [RwLock::new(Arc::clone(&view)), RwLock::new(view)], number }
    }

    pub(crate) fn get(&self) -> Arc<View> {
        loop {
            // The writer holds one at a time: who meets it twice has seen it go on.
            for copy in &self.copies {
                if let Some(view) = copy.try_read() {
                    return Arc::clone(&view);
                }
            }
        }
    }

    /// Whether a view is still one of them, or was until the writer ended. The memory of a number may be another in the next one, and
    /// the writer uses it only after that: so what was read before this, by a view that still is one, was read where it lies.
    pub(crate) fn is_current(&self, view: &View) -> bool {
        fence(Ordering::Acquire);
        view.number >= self.number.load(Ordering::Relaxed)
    }

    /// Replaces both; there is one writer.
    pub(crate) fn set(&self, mut view: View) {
        view.number = self.number.load(Ordering::Relaxed) + 1;
        let (number, view) = (view.number, Arc::new(view));
        for copy in &self.copies {
            let old = std::mem::replace(&mut *copy.write(), Arc::clone(&view));
            drop(old);
        }
        self.number.store(number, Ordering::Relaxed);
        // Before anything that is done with memory of the new one.
        fence(Ordering::Release);
    }
}
