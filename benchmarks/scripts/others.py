"""The scripts, by repository and file, and our lines in them.

`alike` is changed for every way of running, so that runs can be compared: noise that is drawn per row, what is sampled
for show. The two other lists are what somebody who wants several processes writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.edit import Edit, after, before, instead

IMPORT = "import gossamer"
GROUP = 'torch.distributed.init_process_group("gloo")'
WORLD = "torch.distributed.get_world_size()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One of them. `steps`: of its optimizers, of one comparison; `chunk`: of one timing. `needs`: the folder with all
    that it imports.
    """

    name: str
    repository: str
    file: str
    wrap: tuple[Edit, ...]
    ddp: tuple[Edit, ...]
    arguments: tuple[str, ...] = ()
    alike: tuple[Edit, ...] = ()
    needs: str = ""
    steps: int = 12
    chunk: int = 20
    in_order: bool = False  # where a second look at the loader would draw another order
    like_one: bool = True  # whether DDP's ranks together see the batches of one process
    has_batch_norm: bool = False
    note: str = ""


def wrapped(optimizer: str, loader: str, *, batch_norm: bool = False, file: str = "") -> tuple[Edit, ...]:
    """The two lines of most of them. `optimizer`: how the line that makes it begins."""
    more = ', batch_norm="all"' if batch_norm else ""
    line = f"model, optimizer, {loader} = gossamer.wrap(model, optimizer, {loader}{more})"
    return after("import torch", IMPORT, file=file), after(optimizer, line, file=file)


def by_sampler(loader: str, batch: str) -> str:
    """One line that makes a loader anew for one rank's rows."""
    data = f"{loader}.dataset"
    return (
        f"{loader} = torch.utils.data.DataLoader({data}, batch_size={batch} // {WORLD}, "
        f"sampler=torch.utils.data.DistributedSampler({data}))"
    )


def replicated(optimizer: str, loader: str, batch: str) -> tuple[Edit, ...]:
    """The three lines of most of them. No `set_epoch`, which a run of several epochs needs as well."""
    model = "model = torch.nn.parallel.DistributedDataParallel(model)"
    return (after(optimizer, GROUP, by_sampler(loader, batch), model),)


EXAMPLES, TUTORIAL = "pytorch/examples", "yunjey/pytorch-tutorial"
DCGAN = "[netD, netG], [optimizerD, optimizerG], dataloader"
GAN = "[D, G], [d_optimizer, g_optimizer], data_loader"
MAKEMORE = "model, optimizer, batch_loader.train_loader"
NANO = "model, optimizer, iter(lambda: get_batch('train'), None), accumulate=gradient_accumulation_steps"

SCRIPTS = (
    Script(
        name="mnist",
        repository=EXAMPLES,
        file="mnist/main.py",
        arguments=("--no-accel", "--epochs", "1000", "--log-interval", "1000"),
        wrap=wrapped("optimizer = optim", "train_loader"),
        ddp=replicated("optimizer = optim", "train_loader", "args.batch_size"),
        chunk=6,
    ),
    Script(
        name="mnist_rnn",
        repository=EXAMPLES,
        file="mnist_rnn/main.py",
        arguments=("--epochs", "1000", "--log-interval", "1000"),
        wrap=wrapped("optimizer = optim", "train_loader", batch_norm=True),
        ddp=replicated("optimizer = optim", "train_loader", "args.batch_size"),
        has_batch_norm=True,
        chunk=20,
        note="BatchNorm",
    ),
    Script(
        name="vae",
        repository=EXAMPLES,
        file="vae/main.py",
        arguments=("--no-accel", "--epochs", "1000", "--log-interval", "1000"),
        alike=(instead("torch.randn_like(std)", "torch.zeros_like(std)"),),
        wrap=wrapped("optimizer = optim", "train_loader"),
        ddp=(
            *replicated("optimizer = optim", "train_loader", "args.batch_size"),
            instead("model.decode(sample)", "model.module.decode(sample)"),
        ),
        chunk=40,
        note="the loss is a sum over rows: DDP trains on half of the gradient",
    ),
    Script(
        name="dcgan",
        repository=EXAMPLES,
        file="dcgan/main.py",
        arguments=(
            *("--dataset", "fake", "--batchSize", "16", "--ngf", "16", "--ndf", "16", "--workers", "0"),
            *("--manualSeed", "1", "--niter", "1000"),
        ),
        alike=(instead("torch.randn(batch_size, nz, 1, 1, device=device)", "real_cpu.flatten(1)[:, :nz, None, None]"),),
        wrap=(
            after("import torch", IMPORT),
            after(
                "optimizerG = optim",
                f'(netD, netG), (optimizerD, optimizerG), dataloader = gossamer.wrap({DCGAN}, batch_norm="all")',
            ),
        ),
        ddp=(
            after(
                "optimizerG = optim",
                GROUP,
                by_sampler("dataloader", "opt.batchSize"),
                "netD = nn.parallel.DistributedDataParallel(netD)",
                "netG = nn.parallel.DistributedDataParallel(netG)",
            ),
        ),
        has_batch_norm=True,
        chunk=8,
        note="two models, two optimizers, three backward passes, BatchNorm",
    ),
    Script(
        name="super_resolution",
        repository=EXAMPLES,
        file="super_resolution/main.py",
        arguments=("--upscale_factor", "3", "--batchSize", "16", "--threads", "0", "--nEpochs", "1000"),
        alike=(instead("from data import", "from scripts.stand_ins import"),),
        wrap=wrapped("optimizer = optim", "training_data_loader"),
        ddp=replicated("optimizer = optim", "training_data_loader", "opt.batchSize"),
        chunk=8,
    ),
    Script(
        name="word_language_model",
        repository=EXAMPLES,
        file="word_language_model/main.py",
        arguments=("--use-optimizer", "--lr", "0.002", "--dropout", "0", "--data", "text", "--epochs", "1000"),
        wrap=(
            after("import torch", IMPORT),
            after(
                "test_data = batchify",
                "train_data = train_data.chunk(gossamer.ranks(), 1)[gossamer.rank()].contiguous()",
            ),
            after("optimizer = torch.optim", "model, optimizer, _ = gossamer.wrap(model, optimizer, split=False)"),
            instead("model.init_hidden(args.batch_size)", "model.init_hidden(train_data.size(1))"),
        ),
        ddp=(
            before("corpus = data.Corpus", GROUP),
            after(
                "test_data = batchify",
                f"train_data = train_data.chunk({WORLD}, 1)[torch.distributed.get_rank()].contiguous()",
            ),
            after("optimizer = torch.optim", "model = torch.nn.parallel.DistributedDataParallel(model)"),
            instead("model.init_hidden(args.batch_size)", "model.module.init_hidden(train_data.size(1))"),
        ),
        chunk=4,
        note="time-major, no loader, states carried over: every rank takes its columns, split=False",
    ),
    Script(
        name="time_sequence_prediction",
        repository=EXAMPLES,
        file="time_sequence_prediction/train.py",
        arguments=("--steps", "1000"),
        alike=(instead("future = 1000", "future = 10"),),
        wrap=(
            after("import torch", IMPORT),
            after(
                "optimizer = optim.LBFGS",
                "seq, optimizer, loader = gossamer.wrap(seq, optimizer, [(input, target)])",
                "input, target = next(iter(loader))",
            ),
        ),
        ddp=(
            after(
                "optimizer = optim.LBFGS",
                GROUP,
                f"input, target = (t.chunk({WORLD})[torch.distributed.get_rank()] for t in (input, target))",
                "seq = nn.parallel.DistributedDataParallel(seq)",
            ),
        ),
        steps=2,
        chunk=1,
        note="LBFGS, 20 passes a step; 97 rows, so DDP's mean is not of equals",
    ),
    Script(
        name="minGPT chargpt",
        repository="karpathy/minGPT",
        file="projects/chargpt/chargpt.py",
        needs=".",
        arguments=(
            *("--trainer.num_workers=0", "--trainer.batch_size=16", "--model.model_type=gpt-micro"),
            "--data.block_size=64",
        ),
        alike=(instead("generate(x, 500", "generate(x, 5"),),
        wrap=(
            after("import torch", IMPORT, file="mingpt/trainer.py"),
            before(
                "model.train()",
                "model, self.optimizer, train_loader = gossamer.wrap(model, self.optimizer, train_loader)",
                file="mingpt/trainer.py",
            ),
        ),
        ddp=(
            before(
                "model.train()",
                GROUP,
                by_sampler("train_loader", "config.batch_size"),
                "model = torch.nn.parallel.DistributedDataParallel(model)",
                file="mingpt/trainer.py",
            ),
        ),
        chunk=6,
    ),
    Script(
        name="nanoGPT",
        repository="karpathy/nanoGPT",
        file="train.py",
        arguments=(
            *("--device=cpu", "--compile=False", "--dtype=float32", "--dataset=here", "--backend=gloo"),
            *("--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=8"),
            *("--gradient_accumulation_steps=4", "--eval_interval=100000", "--eval_iters=1", "--learning_rate=1e-3"),
            "--warmup_iters=1",
        ),
        alike=(instead("if iter_num % eval_interval == 0 and", "if iter_num % eval_interval == -1 and"),),
        wrap=(
            after("import torch", IMPORT),
            instead("ddp = int(os.environ.get('RANK', -1)) != -1", "ddp = False"),
            instead("X, Y = get_batch('train')", "X, Y = next(batches)"),
            before(
                "checkpoint = None # free",
                f"model, optimizer, loader = gossamer.wrap({NANO})",
                "batches = iter(loader)",
            ),
        ),
        ddp=(
            instead("f'cuda:{ddp_local_rank}'", "'cpu'"),
            instead("torch.cuda.set_device(device)", "pass"),
            instead(", device_ids=[ddp_local_rank]", ""),
        ),
        chunk=2,
        like_one=False,
        note="has DDP: its lines are for a machine without GPUs; its ranks draw batches of their own",
    ),
    Script(
        name="makemore",
        repository="karpathy/makemore",
        file="makemore.py",
        arguments=("--max-steps", "1000000", "--num-workers", "0"),
        alike=(instead("step % 200 == 0", "step % 200000 == 0"), instead("step % 500 == 0", "step % 500000 == 0")),
        wrap=(
            after("import torch", IMPORT),
            after(
                "batch_loader = Infinite",
                f"{MAKEMORE} = gossamer.wrap({MAKEMORE})",
                "batch_loader.data_iter = iter(batch_loader.train_loader)",
            ),
        ),
        ddp=(
            after(
                "batch_loader = Infinite",
                GROUP,
                by_sampler("batch_loader.train_loader", "args.batch_size"),
                "batch_loader.data_iter = iter(batch_loader.train_loader)",
                "model = torch.nn.parallel.DistributedDataParallel(model)",
            ),
        ),
        chunk=10,
        in_order=True,
        note="the loss counts the letters of names of unequal lengths: DDP's mean is not of equals",
    ),
    Script(
        name="GAN",
        repository=TUTORIAL,
        file="tutorials/03-advanced/generative_adversarial_network/main.py",
        alike=(instead("torch.randn(batch_size, latent_size)", "images[:, :latent_size].clone()"),),
        wrap=(
            after("import torch", IMPORT),
            after("g_optimizer = torch", f"(D, G), (d_optimizer, g_optimizer), data_loader = gossamer.wrap({GAN})"),
            before("images = images.reshape(batch", "batch_size = len(images)"),
        ),
        ddp=(
            after(
                "g_optimizer = torch",
                GROUP,
                by_sampler("data_loader", "batch_size"),
                "D = nn.parallel.DistributedDataParallel(D)",
                "G = nn.parallel.DistributedDataParallel(G)",
            ),
            before("images = images.reshape(batch", "batch_size = len(images)"),
        ),
        chunk=20,
        note="two models, two optimizers, two losses in one pass",
    ),
    Script(
        name="bidirectional RNN",
        repository=TUTORIAL,
        file="tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py",
        alike=(instead("num_epochs = 2", "num_epochs = 1000"), instead("batch_size = 100", "batch_size = 50")),
        wrap=wrapped("optimizer = torch", "train_loader"),
        ddp=replicated("optimizer = torch", "train_loader", "batch_size"),
        chunk=4,
    ),
    Script(
        name="residual network",
        repository=TUTORIAL,
        file="tutorials/02-intermediate/deep_residual_network/main.py",
        alike=(instead("num_epochs = 80", "num_epochs = 1000"), instead("batch_size = 100", "batch_size = 16")),
        wrap=wrapped("optimizer = torch", "train_loader", batch_norm=True),
        ddp=replicated("optimizer = torch", "train_loader", "batch_size"),
        has_batch_norm=True,
        chunk=4,
        note="BatchNorm",
    ),
)
