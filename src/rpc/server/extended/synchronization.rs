//! Queues and the order between them: OPEN_QUEUE, WAIT, ASK.

use super::completions::Completions;
use super::queues::Moment;
use super::session::ExtendedSession;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::wire::ext::{Ask, Fault, OpenQueue, Wait};

impl ExtendedSession<'_> {
    pub(super) fn open_queue(&mut self, request: &OpenQueue) -> Result<(), SessionError> {
        let &OpenQueue { queue: number, device } = request;
        let on = self.resources.device(device)?;
        self.queues.admit(number)?;
        let completions = Completions::new(number, &self.writer, self.resources.server.config.device_timeout);
        Ok(self.queues.insert(number, device, on.queue(&self.resources.budget), completions)?)
    }

    pub(super) fn wait(&mut self, request: &Wait) -> Result<(), SessionError> {
        let moment = self.queues.get(request.of)?.moment(request.number)?;
        let queue = self.queues.get(request.queue)?;
        match moment {
            _ if queue.completions.failed() || request.of == request.queue => Ok(()),
            Moment::Reached => Ok(()),
            Moment::At(point) => Ok(queue.submit(|queue| queue.wait(&point)).map(drop)?),
            Moment::Never => {
                let why = format!("queue {}, whose mark {} it waits for, has failed", request.of, request.number);
                Ok(queue.completions.fail(Fault::new(why))?)
            }
        }
    }

    pub(super) fn ask(&mut self, request: &Ask) -> Result<(), SessionError> {
        let queue = self.queues.get(request.queue)?;
        match queue.moment(request.number)? {
            _ if queue.completions.failed() => Ok(()),
            Moment::Reached => Ok(queue.completions.reached(request.number, None)?),
            Moment::At(point) => Ok(queue.completions.reached(request.number, Some(point))?),
            Moment::Never => Ok(()),
        }
    }
}
