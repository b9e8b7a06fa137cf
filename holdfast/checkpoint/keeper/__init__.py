"""The keeper: one process a node that looks after its images.

It takes digests of images when they are whole, copies them to other nodes, writes them to storage,
and fetches them back. It never imports torch, runs at the lowest priority, and decides nothing: orders
come one by one over a socket, each is carried out by a thread of its own and answered when it is done.

    orders     hears orders, has them carried out, answers      exchange   copies, to and from peers
    filing     checkpoints on storage                           movement   what moves, and what hangs

It may die at any moment. What it knew is in the images and on storage; orders that it had not answered
are given to the next one, and doing one twice does no harm.

Storage may hang, for ever and uninterruptibly. The thread that hangs with it is given up, and the
order is answered with an error; everything else goes on.
"""
