//! Waking writers once for a whole engine step.

use std::{cell::RefCell, marker::PhantomData, task::Waker};

thread_local! {
    static BATCH: RefCell<Batch> = const { RefCell::new(Batch { depth: 0, wakers: Vec::new() }) };
}

struct Batch {
    depth: usize,
    wakers: Vec<Waker>,
}

/// While it lives, writers that this thread gives something to are not woken; they are when it is dropped. So all tokens
/// of one engine step leave in one frame and cost one wake-up for each router, even when another thread is idle and
/// would begin to write at the first token.
#[derive(Debug)]
pub struct WakeBatch {
    // Belongs to the thread that began it.
    _not_send: PhantomData<*const ()>,
}

impl WakeBatch {
    /// Begins to hold wake-ups back. Batches nest; the outermost one counts.
    #[must_use]
    pub fn begin() -> Self {
        BATCH.with_borrow_mut(|batch| batch.depth += 1);
        Self { _not_send: PhantomData }
    }
}

impl Drop for WakeBatch {
    fn drop(&mut self) {
        let wakers = BATCH.with_borrow_mut(|batch| {
            batch.depth -= 1;
            if batch.depth == 0 { std::mem::take(&mut batch.wakers) } else { Vec::new() }
        });
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Wakes, or remembers to.
pub(crate) fn wake(waker: Waker) {
    let now = BATCH.with_borrow_mut(|batch| {
        if batch.depth == 0 {
            return Some(waker);
        }
        batch.wakers.push(waker);
        None
    });
    if let Some(waker) = now {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn wake_ups_wait_for_the_outermost_batch() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        wake(Arc::clone(&count).into());
        assert_eq!(1, count.0.load(Ordering::Relaxed));
        let outer = WakeBatch::begin();
        drop({
            let inner = WakeBatch::begin();
            wake(Arc::clone(&count).into());
            inner
        });
        assert_eq!(1, count.0.load(Ordering::Relaxed));
        drop(outer);
        assert_eq!(2, count.0.load(Ordering::Relaxed));
    }
}
