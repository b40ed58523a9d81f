# Fine-tune OpenAI's GPT-2 small on your own text, after pip install -r requirements-hf.txt and
# python data/text/prepare.py my.txt. init_from also takes a Hugging Face folder, such as one from scripts/export_hf.py.
# The learning rate is small and constant because the model knows English.
out_dir = 'out/finetune-text'
init_from = 'gpt2'
dataset = 'text'
optimizer_name = 'adamw'
learning_rate = 3e-5
decay_lr = False
total_batch_size = 32
batch_size = 4
max_iters = 200
eval_interval = 20
eval_sequences = 160
log_interval = 5
always_save_checkpoint = False
