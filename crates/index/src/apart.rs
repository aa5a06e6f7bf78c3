//! What one thread writes all the time must not lie beside what others read all the time.

use std::ops::Deref;

/// A value on cache lines of its own, two of which a processor may fetch together.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(T);

impl<T> Apart<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
