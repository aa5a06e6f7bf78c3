//! Both ends of Connect: frames, side streams, load, aborts.
