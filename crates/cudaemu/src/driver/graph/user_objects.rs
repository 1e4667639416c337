//! User objects: resources of the program with a reference count and a destructor, which graphs can keep alive.

use super::Graphs;
use crate::engine::HostCall;
use crate::error::{Error, Result};
use crate::handle::{GraphId, UserObjectId};

/// A user object.
#[derive(Clone, Debug)]
pub struct UserObject {
    /// The destructor.
    destroy: HostCall,
    references: u64,
}

impl Graphs {
    /// `cuUserObjectCreate`
    pub fn create_object(&mut self, destroy: HostCall, references: u32) -> Result<UserObjectId> {
        if references == 0 || references > i32::MAX as u32 {
            return Err(Error::InvalidValue);
        }
        Ok(self.objects.insert(UserObject { destroy, references: references.into() }))
    }

    /// `cuUserObjectRetain`
    pub fn retain_object(&mut self, object: UserObjectId, count: u32) -> Result<()> {
        if count == 0 || count > i32::MAX as u32 {
            return Err(Error::InvalidValue);
        }
        self.add_references(object, count)
    }

    /// `cuUserObjectRelease`: returns the destructor if the last reference is gone.
    pub fn release_object(&mut self, object: UserObjectId, count: u32) -> Result<Option<HostCall>> {
        let held = self.objects.get(object)?.references;
        if count == 0 || u64::from(count) > held {
            return Err(Error::InvalidValue);
        }
        Ok(self.drop_references(object, count))
    }

    /// `cuGraphRetainUserObject`: transfers the caller's references to the graph (flag 1), or adds new ones.
    pub fn graph_retain_object(&mut self, graph: GraphId, object: UserObjectId, count: u32, flags: u32) -> Result<()> {
        let held = self.objects.get(object)?.references;
        self.entry(graph)?;
        if count == 0 || flags > 1 || (flags == 1 && u64::from(count) > held) {
            return Err(Error::InvalidValue);
        }
        if flags == 0 {
            self.retain_object(object, count)?;
        }
        *self.graphs.get_mut(graph)?.objects.entry(object).or_default() += count;
        Ok(())
    }

    /// `cuGraphReleaseUserObject`
    pub fn graph_release_object(
        &mut self,
        graph: GraphId,
        object: UserObjectId,
        count: u32,
    ) -> Result<Option<HostCall>> {
        let kept = self.graphs.get_mut(graph)?.objects.get_mut(&object).ok_or(Error::InvalidValue)?;
        if count == 0 || count > *kept {
            return Err(Error::InvalidValue);
        }
        *kept -= count;
        if *kept == 0 {
            self.graphs.get_mut(graph)?.objects.remove(&object);
        }
        Ok(self.drop_references(object, count))
    }

    pub(super) fn add_references(&mut self, object: UserObjectId, count: u32) -> Result<()> {
        self.objects.get_mut(object)?.references += u64::from(count);
        Ok(())
    }

    pub(super) fn drop_references(&mut self, object: UserObjectId, count: u32) -> Option<HostCall> {
        let found = self.objects.get_mut(object).ok()?;
        found.references = found.references.saturating_sub(count.into());
        match found.references {
            0 => self.objects.remove(object).ok().map(|object| object.destroy),
            _ => None,
        }
    }
}
